"""Generation of text with whole models, beside other programs."""

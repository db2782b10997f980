"""Generation of text with whole models, and the same in other programs."""

"""The weights of a decoder and their names, as every format of other programs needs them."""

"""Training by several processes (ranks) that together do what one process does, to the byte."""

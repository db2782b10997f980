"""`arb bench`: kernels, training steps and the quality of rules, side by side and with the machine
on record.
"""

__version__ = "0.1.0"

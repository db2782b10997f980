"""What a step of training sends between machines, computed from sizes: ways to train, side by
side.
"""

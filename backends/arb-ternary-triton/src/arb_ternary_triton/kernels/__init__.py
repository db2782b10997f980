"""Device code in Triton's language.

Column indices run in the natural order, and a tile of columns covers whole blocks of 128.

A block is 32 bytes of the packed weight. Byte ``j`` holds columns ``j``, ``j + 32``, ``j + 64`` and
``j + 96`` as codes ``t + 1`` in bits 0-1, 2-3, 4-5 and 6-7. Bit plane ``p`` is 32 consecutive
columns, which share an exponent: no group is smaller. Accumulators of 2 bits are stored like trits.
Accumulators of 4 bits take 64 bytes per block: byte ``j`` holds columns ``j`` and ``j + 64`` as
codes ``a + 8`` in its low and high half.
"""

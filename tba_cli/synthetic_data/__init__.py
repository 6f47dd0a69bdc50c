"""Data sets made by rule, of the same shape as the paper's: small worlds in which small models learn.

The rows of a split are a function of its name and a seed. Splits are by a hash of the content, whatever the seed, so
that nothing held out is trained on; each module says what counts as the same content.
"""

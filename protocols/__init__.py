"""Pure protocol cores and codecs: no I/O, no clock, no global randomness."""

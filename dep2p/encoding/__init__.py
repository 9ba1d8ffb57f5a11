"""Varints, length prefixes, protobuf and CBOR: written in one way only, read strictly. No I/O."""

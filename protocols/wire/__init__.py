"""Frames, headers, payloads, compression, and CBOR with bounds. Pure."""

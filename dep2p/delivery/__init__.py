"""Reliable delivery with an outbox."""

"""Signing policies, signatures over batches, keys of authors."""

"""Reliable delivery, pure: each receiver handles a message once, or the sender knows why not.

`sender`: the messages for one receiver, their tries and ends. `receiver`: the handled messages of one sender.
`wire`: the frames between them. Specification: docs/spec/delivery.md.
"""

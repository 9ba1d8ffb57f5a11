"""Reliable delivery, pure: once to the handler of each receiver that must have it, or the sender knows.

`sender`: what waits for one receiver, its tries and its end. `receiver`: which messages of one sender were handled.
`wire`: the frames between them. Specification: docs/spec/delivery.md.
"""

"""Circuit relay v2 on our own streams, with py-libp2p's messages: serving it, reserving at one, dialling through one.

Rules: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. py-libp2p's own server is not used: it takes the
reserving peer's id out of the message, where any peer can write it.
"""

"""py-libp2p's own muxers and streams behind our interfaces (QUIC, relayed connections)."""

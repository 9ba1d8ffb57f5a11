"""Direct paths to peers that are reached through a relay: https://github.com/libp2p/specs/blob/master/relay/DCUtR.md"""

"""Pure GossipSub cores."""

"""GossipSub as pure cores: a router, its parts, and two codecs (docs/explanation/gossipsub.md, docs/spec/pubsub.md)."""

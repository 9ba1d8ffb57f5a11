"""Resources that live longer than one call: open streams, topics, consumers, sessions, subscriptions."""

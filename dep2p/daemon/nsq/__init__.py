"""The TCP protocol of NSQ and the HTTP API of nsqd."""

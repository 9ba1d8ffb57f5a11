"""The trio shell around the gossipsub router."""

"""Requests to any member that offers a service, and topics whose readers share the messages."""

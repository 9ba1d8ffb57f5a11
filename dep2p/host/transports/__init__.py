"""The ways to listen and dial: TCP, QUIC, WebSocket, circuit relay."""

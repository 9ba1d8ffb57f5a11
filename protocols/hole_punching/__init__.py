"""Direct paths between two nodes behind NAT routers that reach each other through a relay."""

"""Services: requests that any member that offers them answers."""

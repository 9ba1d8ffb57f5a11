"""A bystander's requests while a stranger, a member or a caller attacks the node that answers them."""

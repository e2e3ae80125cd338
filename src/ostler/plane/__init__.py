"""The data plane: a process of its own that takes the clients' connections and streams requests to those who answer them."""

"""Jobs: durable work in a queue. The dispatcher (node) hands it to runners (workers) over the control channel."""

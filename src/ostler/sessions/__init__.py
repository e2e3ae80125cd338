"""Sessions: long-lived connections to workers, relayed by the data plane. docs/sessions.md explains them."""

"""Apps that ship with Ostler, written as a user would write them."""

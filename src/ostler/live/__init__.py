"""LIVE STATE: what is so now, sent to those who watch, when it changes (seed 001's StateBroker). Only listens and reads."""

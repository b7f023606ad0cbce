"""Training state: who gives it, how it is saved, compared and shown."""

"""Methods that are made of two others."""

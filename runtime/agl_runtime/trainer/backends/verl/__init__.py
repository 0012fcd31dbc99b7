"""The verl backend: verl's own trainer, driven through its extension points. Nothing is imported here."""

"""The family `merge_parts`: its parameters and launches."""

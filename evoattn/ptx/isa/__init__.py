"""The instructions, and the control flow of a kernel."""

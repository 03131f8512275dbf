"""Where other libraries ask for an attention function."""

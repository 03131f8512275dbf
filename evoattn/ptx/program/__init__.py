"""PTX text, its types and operands; the threads of a launch."""

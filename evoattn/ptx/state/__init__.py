"""What an instruction works on: registers, memories, mbarriers."""

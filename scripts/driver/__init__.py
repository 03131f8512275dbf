"""Parts of `driver_ceiling.py`: a search whose workers compile and time nothing, with a meter around it."""

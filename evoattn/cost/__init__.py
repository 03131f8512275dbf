"""How long a kernel should take: work in closed forms, the card's rates, and what measured times add to them."""

"""How an author knows that a part is right: a conformance suite for each seam."""

"""Plain torch versions of operations on states other than paged keys and values."""

"""Write anonymised copies of recordings, from which every decision can be derived as from the original."""

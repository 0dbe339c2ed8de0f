"""`guild bench --fp8`: what it measures, and the tables of a record."""

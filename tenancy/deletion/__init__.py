"""Deletion with proof: what to remove, the job that erases it, and the receipt that says so."""

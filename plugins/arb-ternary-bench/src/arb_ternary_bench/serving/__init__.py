"""Servers of language models beside each other, asked over HTTP as their users ask them."""

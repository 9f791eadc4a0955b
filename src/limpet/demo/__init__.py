"""A small shop on loopback to crawl: what `limpet demo` shows Limpet on, and what its own tests crawl.

`catalogue` says what the shop holds and how its pages look; `site` serves it. Neither knows the rest of Limpet.
"""

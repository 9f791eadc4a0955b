"""The only package that speaks HTTP. Asynchronous, and it knows nothing of storage.

http.py          one request, one answer, and Limpet's own verdict on whether it is whole
decode.py        content codings, bounded while streaming
status.py        what a status means for the task
redirects.py     hops: which are followed inside the task, which end it as moved
robots.py        RFC 9309, one fetch in flight per origin
pace.py          politeness: who may send when
retry_after.py   how long a server asks to wait
charset.py       bytes to text, the WHATWG way
page.py          what a handler gets, and links.py the links on it
"""

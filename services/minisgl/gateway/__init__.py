"""The gateway: the OpenAI API over HTTP, and the owner of every request until it is answered.

`requests` judges and replays (no I/O), `fleet` knows which workers live, `link` moves messages
between the bus and the event loop, `calls` groups the choices of one client's request, `answers`
words them, `http` writes them, `app` has the routes and `main` the process.
"""

"""A small HTTP server for test pods; its text is the pod's program.

/events sends ten events, each after the first only when somebody has asked for /next: a reader who
gets all of them can be sure that nothing between keeps one back. Any other path answers with the
pod's name.
"""

import http.server
import os
import threading

NEXT = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET."""

    def do_GET(self) -> None:
        """Send events, or the pod's name."""
        if self.path == "/next":
            NEXT.set()
        self.send_response(200)
        kind = "text/event-stream" if self.path == "/events" else "text/plain"
        self.send_header("Content-Type", kind)
        self.end_headers()
        if self.path != "/events":
            self.wfile.write(os.environ.get("HOSTNAME", "").encode())
            return
        for number in range(10):
            NEXT.clear()
            self.wfile.write(f"data: {number}\n\n".encode())
            self.wfile.flush()
            if not NEXT.wait(30):
                return


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()

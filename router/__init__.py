"""The router: places each phase of each request, follows it through failures, and streams its tokens out."""

"""For applications that chat with a provider: keeps chats and receipts, to be checked later."""

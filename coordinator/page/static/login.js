// Gives a token to the server, once, for a session.
const form = document.getElementById("login");
const error = document.getElementById("error");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  error.hidden = true;
  const token = document.getElementById("token").value.trim();
  try {
    const answer = await fetch("/login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ token }),
    });
    if (answer.ok) {
      location.replace("/");
      return;
    }
    error.textContent = (await answer.json()).error;
  } catch {
    error.textContent = "The server does not answer. Does `dpagent coordinator serve` run?";
  }
  error.hidden = false;
  document.getElementById("token").focus();
});

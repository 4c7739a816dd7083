"use strict";
// Copy a table. A file opened from the disk may have no clipboard of its own; then a selection does it.
async function copy(text) {
  try { await navigator.clipboard.writeText(text); return; } catch { /* the old way below */ }
  const area = document.createElement("textarea");
  area.value = text; area.style.position = "fixed"; area.style.opacity = "0";
  document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
}
for (const button of document.querySelectorAll("button[data-copy]")) {
  const word = button.textContent;
  button.addEventListener("click", async () => {
    await copy(button.dataset.copy);
    button.textContent = "copied"; setTimeout(() => { button.textContent = word; }, 1200);
  });
}
// Show or hide a method in all figures.
for (const button of document.querySelectorAll(".legend button[data-of]")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!shown));
    for (const part of document.querySelectorAll(`svg [data-of="${button.dataset.of}"]`)) part.classList.toggle("off", shown);
  });
}
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
